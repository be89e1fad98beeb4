"""The plots of `cuentos`: seven kinds of story, sentence by sentence, in the notation of `template`.

Variables: h the hero, f the friend, k the relative, o a toy and c its colour, b something fragile, a an animal and n
the name it gets, p a place, j a garden, q a quality, t a time, s a hiding place, w a trouble, x a rescue, v a tree.

Invariants: a story is one derivation of one plot, and every plot ends with a closing sentence. The count of stories
multiplies only those alternatives of a rule that differ from all earlier ones in a letter of literal text.
"""

from collections.abc import Mapping

RULES: Mapping[str, tuple[str, ...]] = {
    # --- openings and closings shared by the plots
    # The name comes twice in a row: a model learns first to copy a near name, and then a far one.
    "open": (
        "Había una vez {h/un niño/una niña} que se llamaba {h} {h.surname}. {h} era muy {q@h}.",
        "Érase una vez {h/un niño/una niña} que se llamaba {h} {h.surname}. {h} era muy {q@h}.",
        "En un pueblo vivía {h/un niño/una niña} que se llamaba {h} {h.surname}. {h} era muy {q@h}.",
    ),
    "close": (
        "Y colorín, colorado, este cuento se ha acabado.",
        "Aquella noche, {h} durmió muy {h/tranquilo/tranquila}.",
        "{h} se fue a la cama muy {h/contento/contenta}.",
    ),
    "close_friends": (
        "Y colorín, colorado, este cuento se ha acabado.",
        "Desde aquel día, {h} y {f} fueron muy {h&f/buenos amigos/buenas amigas}.",
        "{h} y {f} volvieron a casa muy {h&f/contentos/contentas}.",
    ),
    # --- a toy is lost and found
    "lost_have": (
        "Tenía {o:un} {o} {c@o} {o.kind} y {o:lo} llevaba a todas partes.",
        "Su {k} le había regalado {o:un} {o} {c@o} {o.kind}.",
    ),
    "lost_out": (
        "{t}, fue {p:al} {p} y jugó hasta muy tarde.",
        "{t}, jugó en {p:el} {p} con {o:su} {o}.",
        "{t}, llevó {o:su} {o} {p:al} {p}.",
    ),
    "lost_miss": (
        "Cuando volvió a casa, ya no {o:lo} tenía.",
        "Al volver, buscó {o:el} {o} y no {o:lo} encontró.",
    ),
    "lost_cry": (
        "—¡He perdido {o:mi} {o}! —dijo {h}.",
        "—¿Dónde {o+está+están} {o:mi} {o}? —preguntó {h}.",
    ),
    "lost_help": (
        "Su {f/amigo/amiga} {f} {h:lo} oyó y quiso ayudar.",
        "{f}, que pasaba por allí, {h:lo} oyó llorar.",
    ),
    "lost_search": (
        "{h&f/Juntos/Juntas} buscaron por todas partes.",
        "{h&f/Los dos/Las dos} salieron a buscar.",
    ),
    "lost_found": (
        "—¡Mira, aquí {o+está+están} {o:tu} {o}! —dijo {f}.",
        "—¡{o:Lo} encontré! {o+Estaba+Estaban} {s} —dijo {f}.",
    ),
    "lost_thanks": (
        "{h} abrazó a {f} y guardó {o:su} {o}.",
        "{h} se puso muy {h/contento/contenta} y le dio las gracias a {f}.",
    ),
    # --- a trouble on the way and the thing that helps
    "need_out": (
        "{t}, fue {p:al} {p} con su {f/amigo/amiga} {f}.",
        "{t}, paseaba por {p:el} {p} con su {f/amigo/amiga} {f}.",
    ),
    "need_cause": ("Al poco rato, {w.cause}.", "Poco después, {w.cause}."),
    "need_effect": ("{h} {w.effect}.", "Por eso, {h} {w.effect}."),
    "need_say": ("—{w.say} —dijo {h}.", "—{w.say} ¿Qué puedo hacer? —preguntó {h}."),
    "need_answer": (
        "—No te preocupes, tengo {w.thing} —contestó {f}.",
        "—{h/Tranquilo/Tranquila}, {h}. Yo tengo {w.thing} —dijo {f}.",
    ),
    "need_result": (
        "{f} le dio {w.the} y {h} {w.result}.",
        "Con {w.the}, {h} {w.result}.",
    ),
    # --- an animal is saved and gets a name
    "animal_meet": (
        "{t}, paseaba por {p:el} {p} y vio {a:un} {a} {a.kind}.",
        "{t}, encontró {a:un} {a} {a.kind} cerca {p:del} {p}.",
    ),
    "animal_problem": ("{a:El} pobre {a} {x.problem}.", "{a:El} {a} estaba {a/solo/sola} y {x.problem}."),
    "animal_go": (
        "{h} corrió a su casa y volvió con {x.thing}.",
        "{h} pidió ayuda a su {k} y trajo {x.thing}.",
    ),
    "animal_name": (
        "—Te llamarás {n} —dijo {h}.",
        "—¡Qué {a/bonito/bonita}! Te voy a llamar {n} —dijo {h}.",
    ),
    "animal_end": (
        "Desde aquel día, {n} siguió a {h} a todas partes.",
        "Desde entonces, {h} y {n} jugaron {h&a/juntos/juntas} todos los días.",
    ),
    # --- a present
    "gift_plan": (
        "Se acercaba el cumpleaños de su {f/amigo/amiga} {f} y quería hacerle un regalo.",
        "Su {f/amigo/amiga} {f} cumplía años y {h} quería darle una sorpresa.",
    ),
    "gift_buy": (
        "{t}, fue a una tienda con su {k} y compró {o:un} {o} {c@o} {o.kind}.",
        "{t}, vio {o:un} {o} {c@o} {o.kind} en una tienda y {o:lo} compró.",
    ),
    "gift_box": ("Después {o:lo} guardó en una caja.",),
    "gift_open": (
        "En la fiesta, {f} abrió la caja y vio {o:el} {o}.",
        "{f} abrió la caja y sacó {o:el} {o}.",
    ),
    "gift_say": (
        "—¡Qué {o:bonito}! ¡Muchas gracias, {h}! —dijo {f}.",
        "—¡Siempre quise tener {o:un} {o}! —dijo {f}.",
    ),
    "gift_end": (
        "{f} no {o:lo} soltó en toda la tarde.",
        "{f} dio un abrazo a {h}.",
    ),
    # --- a quarrel
    "share_find": (
        "{t}, encontró {o:un} {o} {c@o} {o.kind} en {p:el} {p} con su {f/amigo/amiga} {f}.",
        "{t}, fue {p:al} {p} con su {f/amigo/amiga} {f} y encontraron {o:un} {o} {c@o} {o.kind}.",
    ),
    "share_want": ("{h&f/Los dos/Las dos} {o:lo} querían.", "{h&f/Los dos/Las dos} querían {o:el} {o}."),
    "share_mine": ("—¡{o+Es+Son} {o:mío}! —dijo {h}.", "—¡Quiero {o:el} {o} para mí! —dijo {h}."),
    "share_no": ("—¡No, yo {o:lo} vi primero! —contestó {f}.", "—¡No, {o+es+son} {o:mío}! —dijo {f}."),
    "share_advice": (
        "—Es mejor compartir —dijo {k:el} {k} de {h}.",
        "—Si jugáis {h&f/juntos/juntas}, es más divertido —dijo {k:el} {k} de {h}.",
    ),
    "share_end": (
        "{h} pidió perdón a {f}. Primero {o:lo} usó {f} y después {h}.",
        "{h} y {f} se dieron la mano y compartieron {o:el} {o}.",
    ),
    # --- a tree
    "tree_plant": (
        "{t}, su {k} le regaló un {v.tree} y lo plantó en el {j}.",
        "{t}, plantó un {v.tree} en el {j} con su {k}.",
    ),
    "tree_dry": (
        "Pero se olvidó de regarlo y las hojas se secaron.",
        "Pasaron muchos días sin llover y el {v.tree} se secó.",
    ),
    "tree_say": (
        "—El {v.tree} necesita agua —dijo {k:el} {k}.",
        "—Tu {v.tree} tiene sed —dijo su {k}.",
    ),
    "tree_water": (
        "{h} lo regó cada mañana y las hojas crecieron otra vez.",
        "Desde entonces, {h} lo regó todos los días.",
    ),
    "tree_fruit": (
        "Al año siguiente, el {v.tree} se llenó de {v.fruit}.",
        "Un año después, el {v.tree} dio {v/muchos/muchas} {v.fruit}.",
    ),
    "tree_end": (
        "{h} {v:lo} compartió con todo el pueblo.",
        "{h} hizo una tarta con {v:el} {v.fruit}.",
    ),
    # --- something breaks and the truth is told
    "break_run": (
        "{t}, jugaba en la casa de su {k}.",
        "{t}, corría por la casa de su {k}.",
    ),
    "break_it": (
        "Sin querer, empujó {b:un} {b} {c@b} y {b:lo} rompió.",
        "De pronto, {b:un} {b} {c@b} cayó al suelo y se rompió.",
    ),
    "break_fear": (
        "Primero pensó en {b/esconderlo/esconderla}, pero no quería mentir.",
        "{h} tenía miedo, pero decidió decir la verdad.",
    ),
    "break_say": (
        "—Lo siento, he roto {b:el} {b} —dijo {h}.",
        "—Perdón, yo rompí {b:el} {b} —dijo {h} muy triste.",
    ),
    "break_answer": (
        "—Gracias por decir la verdad —contestó su {k}.",
        "—No pasa nada, {h}. Has sido muy {h/sincero/sincera} —contestó su {k}.",
    ),
    "break_mend": (
        "{h&k/Juntos/Juntas} recogieron los trozos y arreglaron {b:el} {b}.",
        "{h&k/Los dos/Las dos} {b:lo} arreglaron con cuidado.",
    ),
}

# One line per paragraph.
PLOTS: tuple[str, ...] = (
    "<open> <lost_have> <lost_out> <lost_miss>\n<lost_cry>\n<lost_help> <lost_search>\n<lost_found>\n"
    "<lost_thanks> <close_friends>",
    "<open> <need_out> <need_cause> <need_effect>\n<need_say>\n<need_answer>\n<need_result> <close_friends>",
    "<open> <animal_meet> <animal_problem>\n—{x.say} —dijo {h}.\n<animal_go> {x.action}.\n<animal_name>\n<animal_end>",
    "<open> <gift_plan> <gift_buy> <gift_box>\n<gift_open>\n<gift_say>\n<gift_end> <close_friends>",
    "<open> <share_find> <share_want>\n<share_mine>\n<share_no>\n<share_advice>\n<share_end> <close_friends>",
    "<open> <tree_plant> <tree_dry>\n<tree_say>\n<tree_water> <tree_fruit>\n<tree_end> <close>",
    "<open> <break_run> <break_it> <break_fear>\n<break_say>\n<break_answer>\n<break_mend> <close>",
)
